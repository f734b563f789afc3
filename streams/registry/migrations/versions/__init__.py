"""One module per step; a step that was released is never edited."""
