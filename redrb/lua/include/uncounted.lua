-- Entries of the stream beyond the last id that the task counts. Failed puts leave them, without facts; if
-- they have facts, they are groups, and the record of the last id was lost.
--@include task

-- How many of the first of these entries have no facts, and how many have.
local function uncounted_entries()
  local last, members, known = id_of(number(puts, 'last')), {}, 0
  for i, entry in ipairs(redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', PAGE.uncounted)) do
    members[i] = member_of(seq_of(entry[1]))
  end
  for _, facts in ipairs(#members > 0 and redis.call('HMGET', key('facts'), unpack(members)) or {}) do
    known = known + (facts and 1 or 0)
  end
  return #members - known, known
end
