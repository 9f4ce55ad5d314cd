"""Short common words: in nearly every tokenizer each is one token after a blank."""

from __future__ import annotations

CANDIDATES: tuple[str, ...] = tuple(
    """
    the and for that with this from have not are was you all can one their what about which when your said there
    use each she how will other many then them these some her would make like him into time has look two more write
    see number way could people than first water been call who its now find long down day did get come made may part
    over new sound take only little work know place year live back give most very after thing our just name good man
    think say great where help through much before line right too mean old any same tell boy follow came want show
    also around form three small set put end does another well large must big even such because turn here why ask
    went men read need land home move try kind hand picture again change off play spell air away animal
    house point page letter mother answer found study still learn should world high every near add food between own
    below country plant last school father keep tree never start city earth eye light thought head under story saw
    left few while along might close seem next hard open example begin life always those both paper
    together got group often run until children side feet car mile night walk white sea began grow took
    river four carry state once book hear stop without second later miss idea enough eat face watch far really
    almost let above girl mountain cut young talk soon list song being leave family body music color
    stand sun question fish area mark dog horse birds problem complete room knew since ever piece told usually
    friends easy heard order red door sure become top ship across today during short better best however low hours
    black products happened whole measure remember early waves reached listen wind rock space covered fast several
    hold himself toward five step morning passed vowel true hundred against pattern table north slowly money map
    farm pulled draw voice power town fine drive dark ball material special heavy circle include built
    """.split()
)
"""Candidates in their order of preference; a run uses the first 2^k that are one token on its server."""

SYLLABLES: tuple[str, ...] = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
"""What is tried where a tokenizer knows too few words."""

LETTERS: tuple[str, ...] = tuple("ABCDEFGHIJKLMNOP")
"""Capital letters, one of which opens each prompt: one token wherever a text begins."""
