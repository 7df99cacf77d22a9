"""The command line `fprnn COMMAND`: one file for each command that needs one."""
