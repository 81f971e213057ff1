#!/bin/bash
echo 6 > answer.txt
