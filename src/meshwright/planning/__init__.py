"""From any module and a plan to a recipe: every decision, with its reason."""
