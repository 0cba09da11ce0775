"""Whether rows can be run apart: tried before the first step, and watched in each."""
