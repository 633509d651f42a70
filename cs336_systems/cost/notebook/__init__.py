"""The roofline notebook that this project comes from: its tables, what is wrong in them, and what it leaves out."""
