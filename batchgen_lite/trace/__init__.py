"""What a run tells of itself while it goes: events in bounded memory, and the files they become."""
