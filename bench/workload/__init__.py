"""The workloads of workloads.py: services in a process of their own, and clients that check every byte."""
