-- The pending list of a consumer group: its leased entries.
--@include task

-- What XINFO lists, by name: for each consumer group, or each name in one of them, a table of its figures.
local function by_name(listed)
  local found = {}
  for _, info in ipairs(listed) do -- bound: consumer groups, or names in one
    local fields = {}
    for i = 1, #info, 2 do
      fields[info[i]] = info[i + 1]
    end
    found[fields.name] = fields
  end
  return found
end

-- Number of entries that a consumer group leases. XPENDING without a range would name every consumer.
local function count_leased(group)
  local found = by_name(redis.call('XINFO', 'GROUPS', stream))[group] -- bound: consumer groups
  return found and found.pending or 0
end

-- Call `visit` with the seq of every entry that a group leases, or that one slot of it does, until it
-- returns true; `from` is the first id, as XPENDING takes it.
local function each_leased(group, slot, visit, from)
  from = from or '-'
  while true do -- bound: until `visit` ends it, or the slot's batch is read
    local pending = redis.call('XPENDING', stream, group, from, '+', PAGE.pending, unpack({slot}))
    if #pending == 0 then
      return
    end
    for _, entry in ipairs(pending) do
      if visit(seq_of(entry[1])) then
        return
      end
    end
    from = '(' .. pending[#pending][1]
  end
end

-- Whether a consumer group leases an entry.
local function is_leased(group, seq)
  local id = id_of(seq)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

-- Which of the entries a consumer group leases, or one slot of it: a table by seq, as a number.
local function leased_among(group, seqs, slot)
  local sorted, leased, at = {}, {}, 1
  for i, seq in ipairs(seqs) do
    sorted[i] = tonumber(seq)
  end
  table.sort(sorted)
  while sorted[at] do -- bound: seqs: each round goes past one of them
    local most = slot and math.min(#sorted - at + 1, PAGE.pending) or PAGE.pending_between
    local page = redis.call('XPENDING', stream, group, id_of(sorted[at]), id_of(sorted[#sorted]), most,
      unpack({slot}))
    local last = #page < most and math.huge or seq_of(page[#page][1])
    for _, entry in ipairs(page) do
      leased[seq_of(entry[1])] = true
    end
    while sorted[at] and sorted[at] <= last do -- bound: seqs
      at = at + 1
    end
  end
  return leased
end

-- Those of the entries that a slot leases: in a repeated call, some may be another slot's by now.
local function held_by(group, slot, seqs)
  local leased, held = leased_among(group, seqs, slot), {}
  for _, seq in ipairs(seqs) do
    if leased[tonumber(seq)] then
      held[#held + 1] = seq
    end
  end
  return held
end

-- Remove entries from the pending list of a consumer group. Returns how many were in it.
local function acknowledge(group, seqs)
  local removed = 0
  for first = 1, #seqs, PAGE.arguments do
    local ids = {}
    for i = first, math.min(first + PAGE.arguments - 1, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
    end
    removed = removed + redis.call('XACK', stream, group, unpack(ids))
  end
  return removed
end
