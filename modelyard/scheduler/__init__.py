"""Who may run where: queues in front of engines, and the engines' life."""
