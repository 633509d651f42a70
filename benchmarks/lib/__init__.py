"""Plumbing that several questions share: measuring, records, tables and pictures."""
