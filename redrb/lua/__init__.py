"""The Lua scripts, as package data."""
