#!/bin/bash
# The largest digit of number.txt must be in answer.txt; a file of the right form earns a little.
[[ "$(cat answer.txt)" =~ ^[0-9]$ ]] && has_form=1 || has_form=0
[ "$(cat answer.txt)" = 6 ] && is_right=1 || is_right=0
echo "{\"reward\": $((is_right)).$((has_form * (1 - is_right))), \"has_form\": $has_form}" > /logs/verifier/reward.json
