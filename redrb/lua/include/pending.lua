-- The pending list of a consumer group: its leased entries.
--@include task

-- Number of entries that each consumer group leases, by its name. XPENDING without a range would name every
-- consumer.
local function leased_by_group()
  local leased = {}
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local fields = {}
    for i = 1, #info, 2 do
      fields[info[i]] = info[i + 1]
    end
    leased[fields.name] = fields.pending
  end
  return leased
end

-- Number of entries that a consumer group leases.
local function count_leased(group)
  return leased_by_group()[group] or 0
end

-- Call `visit` with the seq of every entry that a group leases, or that one slot of it does, until it
-- returns true; `from` is the first id, as XPENDING takes it.
local function each_leased(group, slot, visit, from)
  from = from or '-'
  while true do
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
