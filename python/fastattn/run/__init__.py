"""How a choice is carried out: layouts, padding, copies, and calls that become calls of another operation."""
