"""Prompts whose answers say whether a head has forgotten general chat: of many kinds, and never trained on.

What the model writes itself does not say it: a head that is trained on some of that drafts the rest of it as well as
before, while other chat is drafted worse (docs/dev/learning.md).
"""

from __future__ import annotations

from draftwing.train.data import Prompt

_PROMPTS = (
    # Writing
    "Write a short letter to a neighbour whose dog barks at night. Be friendly, and suggest two solutions.",
    "Write the opening paragraph of a mystery novel that is set in a lighthouse.",
    "Draft an announcement for a company's summer picnic, with place, time and what to bring.",
    "Write a product description of a folding bicycle for people who commute by train.",
    "Compose a poem of three stanzas about the first snow in a large city.",
    # Roles
    "You are a tour guide in ancient Rome. Welcome your guests and tell them what they will see today.",
    "Pretend to be an old sea captain who is asked by a child why the sea is salty.",
    "Act as a job interviewer for a bakery. Ask me your first three questions and say why you ask them.",
    "You are a gardener who talks to your plants. What do you tell a tomato that does not want to grow?",
    "Speak as a chess coach: your student has lost five games in a row and wants to give up.",
    # Reasoning
    "Anna is taller than Ben, Ben is taller than Carla, and Dora is shorter than Carla. Who is the second tallest?",
    "A farmer has to cross a river with a wolf, a goat and a cabbage. How does he do it?",
    "All the lights in a house go out, but the street is lit. What may have happened, and what would you check first?",
    "Which is the odd one out: violin, cello, flute, guitar? Explain your choice, and name another possible answer.",
    "My train leaves at 9:40, the walk to the station takes 25 minutes, and I want a coffee. When should I leave?",
    # Mathematics
    "A shirt costs 40 euros after a discount of 20 percent. What did it cost before? Show the steps.",
    "Solve the equation 3x + 7 = 2x - 5 and check your result.",
    "A box has 4 red and 6 blue balls. Two are drawn without putting them back. How likely is it that both are red?",
    "What is the area of a circle with a circumference of 31.4 cm?",
    "The mean of five numbers is 12, and four of them are 10, 11, 13 and 15. What is the fifth?",
    # Code
    "Write a Python function that returns the words of a text that occur most often, and explain how it works.",
    "What does this code print, and why?\n\nfor i in range(3):\n    print(i * i)",
    "Write an SQL query that lists customers who have ordered nothing this year, from tables customers and orders.",
    "Explain the difference between a list and a tuple in Python, with an example of each.",
    "Write a JavaScript function that tells whether a string is a palindrome.",
    # What is in a text
    "Name the persons and places here: On Monday Maria Lopez flew from Lisbon to Oslo, where Erik Dahl met her.",
    "Rate these reviews from 1 to 5, as a list:\n- Never again.\n- Good food, slow service.\n- Our best evening!",
    "Turn this into a table with name, age and city: Tom is 31 and lives in Leeds; Priya, 27, is from Pune.",
    "Summarise in one sentence: The council decided on Tuesday to close the old bridge for repairs until spring. Buses "
    "will take another way, and a ferry for pedestrians is to run every ten minutes.",
    "Find the mistakes in this sentence and correct them: Their going too the libary because they needs books.",
    # Science
    "Why is the sky blue during the day and red at sunset?",
    "Explain to a ten-year-old how vaccines work.",
    "What is the difference between weather and climate?",
    "How does a refrigerator keep food cold?",
    "What would happen to the tides if the Moon were twice as far away?",
    # Society
    "What were the main causes of the First World War?",
    "Compare the advantages of working at home and in an office.",
    "Why do some countries have two official languages? Give examples.",
    "How did the printing press change Europe?",
    "Give arguments for and against a speed limit on all motorways.",
)  # fmt: skip


def general_prompts() -> list[Prompt]:
    """Returns the prompts, in their order."""
    return [Prompt((text,), where="general_prompts.py") for text in _PROMPTS]
