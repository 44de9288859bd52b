"""One file a command; `streamvid.cli` lists them in one table and imports each only when it is run."""
