"""What every command has: its arguments, its help, its exit code, its signals."""
