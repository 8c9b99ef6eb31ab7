"""The media that come with kvtier. The core never imports them: it finds them by URL scheme."""
