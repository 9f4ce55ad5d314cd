"""One file per command: each joins the rooms by handing values along."""
