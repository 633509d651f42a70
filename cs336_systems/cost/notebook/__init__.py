"""The roofline notebook that this project comes from: its tables, and what is wrong in them."""
