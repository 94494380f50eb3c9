-- Entries of the stream beyond the last id that the task counts. Failed puts leave them, without facts; if
-- they have facts, they are groups, and the record of the last id was lost.
--@include task

-- The bytes of an entry.
local function size_of(entry)
  local bytes = 0
  for _, value in ipairs(entry[2]) do -- bound: fields of an entry
    bytes = bytes + #value
  end
  return bytes
end

-- The first of the entries beyond `last` up to the id `to`, and whether there may be more. They are read one
-- by one, since each may be large.
local function entries_beyond(last, to)
  local seqs, after, read = {}, id_of(last), 0
  while #seqs < PAGE.orphans and read < PAGE.copied_bytes do -- bound: PAGE.orphans
    local entry = redis.call('XRANGE', stream, '(' .. after, to, 'COUNT', 1)[1]
    if not entry then
      return seqs, false
    end
    seqs[#seqs + 1], after = seq_of(entry[1]), entry[1]
    read = read + size_of(entry)
  end
  return seqs, true
end

-- How many of the first of these entries have no facts, how many have, and whether there may be more. If the
-- last id is not known, none is counted.
local function uncounted_entries()
  local last, members, known = redis.call('HGET', puts, 'last'), {}, 0
  if not last then
    return 0, 0, false
  end
  local seqs, more = entries_beyond(tonumber(last), '+')
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  for _, facts in ipairs(#members > 0 and redis.call('HMGET', key('facts'), unpack(members)) or {}) do
    known = known + (facts and 1 or 0)
  end
  return #members - known, known, more
end
