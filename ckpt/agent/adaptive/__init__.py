"""What the agent learns while jobs run: it acts on predicted failures, and hands learnt failure rates to later starts.

It may import the packages from job downwards. Start reading at alarms.py.
"""
