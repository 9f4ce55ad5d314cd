"""What people read: tables as markdown, and the blocks of a README that are made of them."""
