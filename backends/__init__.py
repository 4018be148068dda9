"""The backends of hal itself: a folder each, one op one file, no privileges over a third party's."""
