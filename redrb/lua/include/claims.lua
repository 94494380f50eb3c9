-- Leases entries to a slot of a consumer.
--
-- A lease is a table of group, pool and slot, and the result so far: claimed and lost, numbers of
-- entries leased and of entries that another client had deleted; members; weights if they are drawn.
--@include task pools history groups staleness

-- Lease entries. Returns the ids of those that exist.
local function claim(lease, ids)
  local held = ids
  if #ids > 0 then
    local command = {'XCLAIM', stream, lease.group, lease.slot, 0}
    for i, id in ipairs(ids) do
      command[5 + i] = id
    end
    command[6 + #ids] = 'FORCE'
    command[7 + #ids] = 'JUSTID'
    held = redis.call(unpack(command))
    lease.claimed = lease.claimed + #held
  end
  return held
end

-- Lease members of the pool of a lease.
local function claim_members(lease, found)
  local ids = {}
  for i, member in ipairs(found) do
    ids[i] = BASE .. member
    lease.members[#lease.members + 1] = member
  end
  local all = note_taken(lease.group, lease.pool, found, lease.weights)
  withdraw(lease.group, lease.pool, found, all)
  local held = #claim(lease, ids)
  lease.lost = lease.lost + #ids - held
  if held < #ids then
    for i in ipairs(ids) do
      if not is_leased(lease.group, found[i]) then
        delete({tonumber(found[i])})
      end
    end
  end
end
