"""Running a recipe: process groups, the order of application, the step, checkpoints."""
