"""Defines the public functions: each checks its arguments, chooses a backend, and runs the call there."""
