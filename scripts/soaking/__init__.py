"""What soak.py and idle.py are made of. Nothing here is imported by the package."""
