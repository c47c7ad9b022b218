"""What conformance.py is made of. Nothing here is imported by the package."""
