-- Deletes indexes that a task needs no more.
--@include task facts

-- Delete an index of all pools: a kind of sorted set, and of the kind tag the name of the tag.
local function drop_index(kind, tag)
  for _, group in ipairs(groups()) do
    for _, status in ipairs(STATUSES) do
      local pool = pool_of(group, status)
      redis.call('UNLINK', key(kind, tag and pool .. ':' .. tag or pool))
    end
  end
end
