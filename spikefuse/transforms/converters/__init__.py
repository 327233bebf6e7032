"""What `convert` makes of the modules of other libraries, a file per library."""
