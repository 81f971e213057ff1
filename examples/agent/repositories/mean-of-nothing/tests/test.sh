#!/bin/bash
cp /tests/test_averages.py .
python -m unittest -q test_averages && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
