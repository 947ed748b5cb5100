"""Laws of drafting: what drafters propose, how deep it pays to draft, and that verifying leaves the distribution."""
