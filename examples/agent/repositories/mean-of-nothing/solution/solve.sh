#!/bin/bash
git apply /solution/fix.patch
