"""Private parts of outside libraries that this project touches, one module per library."""
