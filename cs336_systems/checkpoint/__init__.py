"""Checkpoints that are whole or not there, verified before use, and readable in any layout."""
