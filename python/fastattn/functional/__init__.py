"""Defines the public functions: each checks its arguments, asks for a backend, and runs the call there."""
