"""From files and generators to `Task`s, and from pictures to what a vision tower reads."""
