"""All that a file may say, from the code: as a page for people, and as a JSON Schema for editors."""
