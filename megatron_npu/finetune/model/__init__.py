"""Prepare a user's model according to the switches, which select sharding, compilation, 16-bit precision
and more.
"""
