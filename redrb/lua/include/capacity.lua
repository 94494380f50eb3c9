-- Says how many groups the bounds of a task let in.
--@include task

-- How many more groups may wait, of at most `most` for a consumer group; without one all stored groups wait.
-- `added`: groups that are stored already, and in no pool yet.
local function waiting_left(most, added)
  --@include ledger
  local all, waiting = groups(), 0
  for _, group in ipairs(all) do
    waiting = math.max(waiting, waiting_in_all_pools(group))
  end
  return most - (all[1] and waiting + added or redis.call('XLEN', stream))
end

-- How many groups the bounds let in now.
local function room_left()
  local known = numbers(task, 'limit', 'max_waiting', 'max_bytes', 'bytes')
  if known[3] > 0 and known[4] >= known[3] then
    return 0
  end
  return math.min(known[1] > 0 and known[1] - redis.call('XLEN', stream) or math.huge,
    known[2] > 0 and waiting_left(known[2], 0) or math.huge)
end
