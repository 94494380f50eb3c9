-- Leases that end without an acknowledgement: their groups are requeued, or become dead letters when their
-- deliveries have failed too often.
--
-- A slot is the name under which Redis lists the groups of one lease as pending: <consumer>/<number>.
-- leases:<group> holds the newest lease of each slot: "<token>" while it is valid; "<token> part" once its
-- consumer has requeued or rejected some of its groups; "<token> ended", or "<token> requeued ended" when its
-- last groups were requeued, so that no other rank ends one; or "<token> lost". A lease is lost before the
-- first of its groups is requeued for others, so its consumer cannot end a group that another one may have by
-- then. returning:<group> holds the lost leases of which a part was requeued, by slot, with their failure.
-- slots:<group> sorts the slots by name. deliveries:<group> holds failed deliveries by seq.
--
-- A failure says how a delivery failed: {consumer, text, exception}, as add_dead_letter takes it. It is false
-- where the delivery does not count.
--@include task facts pools groups pending dead_letters

local function max_deliveries()
  local stored = redis.call('HMGET', task, 'max_deliveries', 'default_max_deliveries')
  return tonumber(stored[1] or stored[2])
end

local function fields_of(seq)
  local id = id_of(seq)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  return entry and entry[2] or {}
end

-- Let entries wait that are neither leased nor waiting: in their old places, or in newly drawn ones.
local function requeue(group, seqs)
  local members, pools, found = {}, {}, {}
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  local moved = redis.call('EXISTS', key('moved', group)) == 1
    and replies_of('HMGET', key('moved', group), members) or {}
  for i, facts in ipairs(facts_of_all(members)) do
    if not facts and #fields_of(seqs[i]) > 0 then -- its facts are lost, it is not
      facts = {status = 'completed', score = rules().sampled and 1 or nil}
    end
    if facts then -- else another client deleted the entry
      local pool = pool_of(group, moved[i] or facts.status)
      pools[pool] = pools[pool] or {members = {}, facts = {}}
      table.insert(pools[pool].members, members[i])
      table.insert(pools[pool].facts, facts)
      found[#found + 1] = seqs[i]
    else
      add(key('group', group), 'evicted', 1)
    end
  end
  for pool, entries in pairs(pools) do
    enter(group, pool, entries.members, entries.facts)
  end
  let_evict(found)
end

local copied = 0 -- bytes of payload that this script has copied to dead letters

-- Count a failed delivery of leased entries, and make those that failed too often dead letters. Returns the
-- other entries, and how many entries it has looked at: unless `all` are to be, it ends with a page of bytes.
local function fail(group, seqs, failure, all)
  local most, left, worn, seen = max_deliveries(), {}, {}, 0
  for i, seq in ipairs(seqs) do
    if copied >= PAGE.copied_bytes and not all then
      break
    end
    seen = i
    local failed = redis.call('HINCRBY', key('deliveries', group), member_of(seq), 1)
    if failed < most then
      left[#left + 1] = seq
    else
      local fields = fields_of(seq)
      redis.call('XACK', stream, group, id_of(seq))
      add_dead_letter(group, seq, fields, failure,
        'delivered ' .. failed .. ' times without acknowledgement')
      worn[#worn + 1] = seq
      copied = copied + #(fields[2] or '')
    end
  end
  forget(group, worn)
  return left, seen
end

-- Requeue entries that a slot leases. Returns how many of them, the first ones, are leased no more: all but
-- those beyond a page of bytes, or `all`.
local function return_held(group, seqs, failure, all)
  local left, seen = seqs, #seqs
  if failure then
    left, seen = fail(group, seqs, failure, all)
  end
  acknowledge(group, left)
  requeue(group, left)
  add(key('group', group), 'returned', #left)
  return seen
end

-- Take a slot's lease from its consumer. Its groups stay leased until return_slot requeues them. A consumer
-- that gives up a lease names its `token`, in case the take arrives later.
local function lose(group, slot, failure, token)
  token = token or string.match(redis.call('HGET', key('leases', group), slot) or '', '^%d+') or '0'
  redis.call('ZADD', key('slots', group), 0, slot)
  redis.call('HSET', key('leases', group), slot, token .. ' lost')
  redis.call('HSET', key('returning', group), slot, cmsgpack.pack(failure or false))
end

-- Take a slot's lease from its consumer, and requeue at most `most` of its groups. Returns their number, and
-- whether the slot leases nothing any more.
local function return_slot(group, slot, failure, most, token)
  lose(group, slot, failure, token)
  local seqs = {}
  for i, entry in ipairs(redis.call('XPENDING', stream, group, '-', '+', most, slot)) do
    seqs[i] = seq_of(entry[1])
  end
  local returned = #seqs > 0 and return_held(group, seqs, failure) or 0
  local emptied = returned == #seqs and #seqs < most
  if emptied then
    redis.call('HDEL', key('returning', group), slot)
  end
  return returned, emptied
end

-- Forget a slot that leases nothing.
local function remove_slot(group, slot)
  redis.call('HDEL', key('leases', group), slot)
  redis.call('ZREM', key('slots', group), slot)
  redis.call('XGROUP', 'DELCONSUMER', stream, group, slot)
end
