"""Streams, events and memory that the groups below one root share. See docs/schedule.md."""
