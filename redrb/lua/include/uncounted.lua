-- Entries of the stream beyond the last id that the task counts. Failed puts leave them, without facts; if
-- they have facts, they are groups, and the record of the last id was lost.
--@include task

-- How many of the first of these entries have no facts, and how many have. If the last id is not known, none
-- is counted.
local function uncounted_entries()
  local stored, members, known = redis.call('HGET', puts, 'last'), {}, 0
  if not stored then
    return 0, 0
  end
  local last = id_of(tonumber(stored))
  for i, entry in ipairs(redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', PAGE.uncounted)) do
    members[i] = member_of(seq_of(entry[1]))
  end
  for _, facts in ipairs(#members > 0 and redis.call('HMGET', key('facts'), unpack(members)) or {}) do
    known = known + (facts and 1 or 0)
  end
  return #members - known, known
end
