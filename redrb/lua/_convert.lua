-- From a plain task to an indexed one.

-- Make a plain task an indexed one: what waits gets facts and its place in the order.
local function index_all(all)
  local last = number(task, 'last')
  redis.call('HSET', task, 'indexed', '1')
  known_rules = nil
  local function describe(member, seq)
    local size = redis.call('HGET', key('sizes'), string.format('%.0f', seq)) or '0'
    local score = rules().order == 'fifo' and string.format('%.0f', seq) or rules().sampled and '1'
    local text = size .. ' completed ' .. (score or 'inf') .. ' - - - 0 1'
      .. string.rep(' -', #rules().names)
    redis.call('HSETNX', key('facts'), member, text)
    return words(text)
  end
  local function each_stored(after, visit)
    local from, entries = '(' .. id_of(after), {}
    repeat -- few at a time: they come with all their bytes
      entries = redis.call('XRANGE', stream, from, id_of(last), 'COUNT', 50)
      for _, entry in ipairs(entries) do
        visit(seq_of(entry[1]))
      end
      from = #entries > 0 and '(' .. entries[#entries][1] or from
    until #entries == 0
  end
  local first = last + 1
  for _, group in ipairs(all) do
    local state = key('group', group)
    local seqs = {}
    for _, member in ipairs(redis.call('ZRANGE', key('ready', group), 0, -1)) do
      seqs[#seqs + 1] = tonumber(member)
    end
    redis.call('DEL', key('ready', group))
    local cursor, returned = number(state, 'cursor'), #seqs
    if number(state, 'waiting') == returned + last - cursor then
      for seq = cursor + 1, last do
        seqs[#seqs + 1] = seq
      end
    else -- evictions and puts that were undone left gaps
      each_stored(cursor, function(seq)
        seqs[#seqs + 1] = seq
      end)
    end
    local members, facts = {}, {}
    for i, seq in ipairs(seqs) do
      members[i] = member_of(seq)
      facts[i] = describe(members[i], seq)
      first = math.min(first, seq)
    end
    enter(group, group, members, facts)
    redis.call('HSET', state, 'cursor', string.format('%.0f', last),
      'taken', string.format('%.0f', math.max(number(task, 'put') - number(state, 'waiting'), 0)))
    local from, pending = '-', {}
    repeat
      pending = redis.call('XPENDING', stream, group, from, '+', 500)
      for _, entry in ipairs(pending) do
        local seq = seq_of(entry[1])
        describe(member_of(seq), seq)
        first = math.min(first, seq)
      end
      from = #pending > 0 and '(' .. pending[#pending][1] or from
    until #pending == 0
  end
  if #all == 0 then -- nobody has joined: all that is stored waits for whoever does
    each_stored(0, function(seq)
      describe(member_of(seq), seq)
      first = math.min(first, seq)
    end)
  end
  redis.call('HSET', task, 'floor', string.format('%.0f', first))
end
