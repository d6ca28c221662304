"""The text on which rounded numbers are judged: our own, of several kinds, so that no model has learned it by heart."""

from __future__ import annotations

TEXT = """\
The lock-keeper's notebook, third winter

Nobody had told me that water has a memory. In the first week the upper gate would not close by the width of a hand, and
I leaned on the beam until my shoulder was blue. On the eighth day it closed by itself, quietly, while I was eating. The
old keeper laughed when I wrote to him about it. "It was never the gate," he answered. "Upstream they cut reeds in
October. You were closing it on a forest." Since then I write down what happens a day's walk away: reeds, rain,
weddings, the mill that only runs when flour is dear. My own lock is explained by things I cannot see from it.

There are three kinds of boats. The first kind hurries and bumps its bow against the sill, and I raise the paddles
slowly for it, out of spite. The second kind waits with its engine off, and I raise them slowly, too, out of respect.
The third kind does not come at all. I keep a list of those: the Annabel, due on the fourteenth; the Two Brothers, which
became one brother, then a bicycle shop; a green boat without a name whose owner paid in plums.

How to set the weir after a storm:

1. Read the gauge twice. If the two readings differ by more than 4 cm, somebody is standing on it.
2. Open paddle A by a quarter turn for every 10 cm above 1.80 m, but never by more than two full turns.
3. Wait eleven minutes. The wave from paddle A needs nine to reach the bend and come back.
4. If the level still rises, open B by half of what you gave A, and ring the bell for the ferry.
5. Write it down before you dry your hands, or you will not write it down.

A small program does the sum for me now. My niece wrote it on the back of a bill:

    def turns(level_cm, open_already=0.0):
        surplus = max(0, level_cm - 180)
        wanted = 0.25 * (surplus // 10)
        return min(2.0, wanted) - open_already

With a level of 214 cm the surplus is 34, which makes three steps of ten, so 0.75 turns; had I already given it half a
turn, a quarter would be left. She also taught it to answer in a machine's voice, {"level": 214, "paddle": "A", "turns":
0.75}, and to say "unknown" when the gauge is under ice, which is more than most people manage.

In February the inspector came. He asked why the book had two entries for the same night. I said that one was what I
saw and the other what I understood in the morning. He thought about this for as long as a barge takes to sink by one
plank, then he signed both. "Most keepers," he said, "only keep the second one."
"""
