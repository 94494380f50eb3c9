-- Leases entries to a slot of a consumer.
--
-- A lease is a table of group, pool and slot, and the result so far: claimed and lost, numbers of
-- entries leased and of entries that another client had deleted; members; weights if they are drawn.
--@include task facts

-- At most `most` of the first members of a pool. In a sampled order groups of weight 0 have the same place,
-- behind all others: they are drawn when nothing else is left.
local function lowest_of(pool, most)
  local ready = key('ready', pool)
  local found = redis.call('ZRANGE', ready, 0, most - 1)
  if not rules().sampled or #found == 0 or redis.call('ZSCORE', ready, found[#found]) ~= 'inf' then
    return found
  end
  local weighed = redis.call('ZCOUNT', ready, '-inf', '(+inf')
  return weighed > 0 and {unpack(found, 1, weighed)} or redis.call('ZRANDMEMBER', ready, most)
end

-- Lease members of a pool, which they have just left.
local function claim_members(lease, found)
  if #found == 0 then
    return
  end
  local command = {'XCLAIM', stream, lease.group, lease.slot, '0'}
  for i, member in ipairs(found) do
    command[5 + i] = BASE .. member
    lease.members[#lease.members + 1] = member
  end
  command[6 + #found], command[7 + #found] = 'FORCE', 'JUSTID'
  local held = #redis.call(unpack(command))
  lease.claimed, lease.lost = lease.claimed + held, lease.lost + #found - held
end

-- Count the entries of a lease that another client had deleted as evicted.
local function forget_lost(lease)
  --@include deletion pending
  for _, member in ipairs(lease.members) do
    if not is_leased(lease.group, member) then
      delete({tonumber(member)})
    end
  end
  add(key('group', lease.group), 'evicted', lease.lost)
end
