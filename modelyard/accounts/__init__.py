"""Accounts: API keys and what they may do, what each has used, and what that costs."""
