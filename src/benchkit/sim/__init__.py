"""The simulated OpenAI-compatible endpoint, whose right answers are known; shares no line with what it tests."""
