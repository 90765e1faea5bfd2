"""Bookings of a room: who has it when."""
