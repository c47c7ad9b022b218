"""Transports of aiozc's loop: stream.py (TCP, Unix), listener.py (accepting), tls.py (zc_* over TLS)."""
