"""The package as a library: functions for notebooks and programs, over what the command line is made of."""
