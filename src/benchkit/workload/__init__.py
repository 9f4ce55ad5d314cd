"""Prompts whose token counts are known before they are sent."""
