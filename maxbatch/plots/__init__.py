"""One style for all pictures. Each picture is drawn beside what it shows."""
